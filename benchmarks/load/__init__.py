"""
The load generators. Each is a process of its own: ``python -m benchmarks.load NAME OPTIONS``, see `__main__`.

They use raw sockets and one epoll, and keep their work per request small, since they share the machine with the server.
"""
