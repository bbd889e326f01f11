"""Tools that the chapters share: options, tables, and the comparison of the book's answers with ours.

page, options       the page that a chapter prints on, and the options that it has
layout, answers     numbers and tables in the book's notation; the book's answers compared with ours
arrays, decoding    a chapter's arrays from their types; a prompt and the tokens after it
listing, learning   a chapter's listing on ranks compared with one device, and its training loop
drawing             the frames of a file's listings, `python -m scaling.show listing FILE`
hlo                 the shapes in XLA's programs
notebook            run chapters as scripts or as notebooks
"""
