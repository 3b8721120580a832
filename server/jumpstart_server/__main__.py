"""``python -m jumpstart_server`` is the ``jumpstart`` command."""

from jumpstart_server.cli import main

if __name__ == "__main__":
    main()
