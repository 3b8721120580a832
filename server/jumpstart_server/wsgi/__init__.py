"""
WSGI over HTTP/1.1: threads that wait for their own events, and write to the socket themselves.

Reading order: `server` (starts, ends, dispatches events) and the floors that it stands on: `reading` (from bytes to a
request), `running` (the handler), `answers` (of our own), `table` (the connections). Then `pool` (who waits, who
works), `connection` (who owns it), `exchange` (PEP 3333), `deadlines` (requests that are over). Beside them:
`listeners`, `waiting` (the queue), `pace` (pure), `timers` (of connections), `body`, `environ`, `files`, `syscalls`.
`engine` is what the worker sees of it all.
"""
