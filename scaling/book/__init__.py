"""What the chapters share: their options and tables, and the book's answers beside ours."""
