"""What the web side can do, one function each; HTTP is told from here of nothing but values and errors."""
