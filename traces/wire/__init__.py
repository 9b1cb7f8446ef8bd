"""Response formats: bytes of one family of APIs in, tokens and usage out. One file a family, no I/O."""
