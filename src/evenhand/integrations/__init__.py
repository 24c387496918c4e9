"""Bridges to other tools, one file each; the tools are optional and imported on first use."""
