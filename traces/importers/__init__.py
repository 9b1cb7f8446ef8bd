"""Traces that others publish or record, read into request records. One file a source."""
