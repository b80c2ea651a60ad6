"""Who may use the page, and how they prove it."""
