"""Ready tools."""
