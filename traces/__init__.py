"""What one request is, how it is measured off the wire, and the files, statistics and shapes of many."""
