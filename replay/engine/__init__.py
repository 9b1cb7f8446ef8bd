"""The embedded engine: vLLM's V1 scheduler in front of a step-time model. Imports nothing of the sender."""
