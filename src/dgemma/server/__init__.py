"""HTTP around an engine. This package file imports nothing, so that each part can be loaded alone."""
