"""``turncache report``: what the ghost has seen, as one page."""
