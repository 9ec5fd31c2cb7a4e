"""Reports for people: one list of sections, drawn on a terminal or written as an HTML page."""
