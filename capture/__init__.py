"""Record requests that pass through mitmproxy: timing and lengths, never a word of text."""
