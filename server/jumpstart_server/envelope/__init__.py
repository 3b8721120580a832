"""What both engines share of a tenant's envelope: its limits, and what happens when they are reached."""
