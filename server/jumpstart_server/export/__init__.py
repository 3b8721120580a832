"""
The tenants of `jumpstart.toml`, written for the engine that runs a fleet of them: nginx, envoy, systemd, kubernetes.

`model.py` takes from the settings what an engine must know; each engine is one module with pure functions from that to
text. Every figure in the text stands beside the keys that it comes from.
"""
