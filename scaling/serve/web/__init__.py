"""The engine behind HTTP: a server of the calls that OpenAI's clients make. It needs the extra `serve`.

desk     requests that come while the engine runs, and where their tokens go     loop, on every rank
words    the calls' JSON, both ways              app      what each address answers
server   the socket, the thread, the end         figures  what is measured
"""
