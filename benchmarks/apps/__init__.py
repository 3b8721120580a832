"""The apps that are served. Servers import them as top-level modules, from this folder."""
