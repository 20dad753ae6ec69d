"""The front door over ASGI and over sockets, with a fake cluster behind it."""
