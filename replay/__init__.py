"""Play a trace against a serving engine on its own clock, and report what the tenants felt."""
