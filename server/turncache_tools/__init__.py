"""The tools: command line, demo, and what shows that it pays."""
