"""Reports on statistics and programs as text, as JSON, or as an HTML page with drawings."""
