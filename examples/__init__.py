"""Programs that take derivatives of compiled code, each a script to start from."""
