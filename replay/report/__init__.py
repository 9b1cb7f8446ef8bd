"""A run for people to read: terminal tables and one self-contained HTML file."""
