"""Who shares the engine: mixes, priorities and their dialects, SLAs, blocking and isolation."""
