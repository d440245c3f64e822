"""The HTTP layer: errors, authentication, admission, bodies, server-sent events, log, metrics, routes."""
