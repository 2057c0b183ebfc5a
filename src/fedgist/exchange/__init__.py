"""How gists travel between clients and server."""
