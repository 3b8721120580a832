"""
Warm by traffic: the requests that warm-up replays, who replays them, and what was cold while they ran.

Middle floor of the house: it may import `jumpstart`, never `jumpstart_server`. Nothing is imported here; take what you
need from the module that has it:

- `corpus`: warm-up requests, from a file or recorded from real traffic with everything personal removed
- `inprocess`: drive an ASGI or WSGI app in this process, results discarded
- `observe`: per-route statistics and cold events of each request; middleware for both interfaces
- `settle`: the rule that says when a host is warm
- `http`: drive another host over HTTP until it is warm
"""
