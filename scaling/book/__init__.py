"""Tools that the chapters share: options, tables, and the comparison of the book's answers with ours."""
