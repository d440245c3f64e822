"""The loop: from prompt tokens to an answer, canvas by canvas or token by token."""
