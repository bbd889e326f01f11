"""The engine behind HTTP: a server of the calls that OpenAI's clients make. It needs the extra `serve`.

desk     the engine turn by turn; requests that arrive while it runs, the way of their tokens, and measurements
app      the answer of each address, the key, and the pages that may read answers
words    the JSON that clients send and get
server   the socket, the ranks that run the server, and how it ends
"""
