"""A small shop that is slow when cold, the way real web apps are. Start reading at `shop.pages`."""
