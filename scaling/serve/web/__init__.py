"""The engine behind HTTP: a server of the calls that OpenAI's clients make. It needs the extra `serve`.

desk     the engine turn by turn; requests that come while it runs, and where their tokens go
words    the calls' JSON, both ways              app      what each address answers
server   the socket, the end                     figures  what is measured
gate     the key
"""
