"""The engine behind HTTP: a server of the calls that OpenAI's clients make. It needs the extra `serve`.

desk     the engine turn by turn; requests that arrive while it runs, and where their tokens go
app      what each address answers               gate     the key, and the pages that may read answers
words    the JSON that clients send              answers  the JSON that they get
server   the socket, and the end                 figures  what is measured
"""
