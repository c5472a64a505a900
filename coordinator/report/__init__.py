"""The report of a federation: gathered from the archive as plain data, then written as HTML, Markdown or JSON."""
