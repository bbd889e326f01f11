"""The engine behind HTTP: a server of the calls that OpenAI's clients make. It needs the extra `serve`.

desk     the engine turn by turn; requests that arrive while it runs, and the way of their tokens
app      the answer of each address              gate     the key, and the pages that may read answers
words    the JSON that clients send              answers  the JSON that they get
server   the socket, and the end                 figures  the measurements
"""
