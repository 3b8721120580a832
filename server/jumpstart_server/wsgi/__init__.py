"""
WSGI over HTTP/1.1: threads that wait for their own events, and write to the socket themselves.

Reading order: `server` (accepts, reads, dispatches), `pool` (who waits, who works), `connection` (who owns it),
`exchange` (PEP 3333). Beside them: `listeners`, `waiting` (the queue), `pace` and `deadlines` (pure), `body`,
`environ`, `files`, `syscalls`. `engine` is what the worker sees of it all.
"""
