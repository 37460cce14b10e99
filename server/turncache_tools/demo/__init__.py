"""The demo: one agent, its tools, and what the caches made of its waits, on real engines.

Pure modules (``sizes``, ``history``, ``answers``, ``compare``, ``counters``, ``rows``,
``figures``, ``chart``, ``page``) take values and return values. Shells (``callers``,
``flood``, ``arms``, ``scenes``, ``edited``, ``leftovers``, ``machine``, ``screen``) do the
I/O, and ``command`` is the only place that wires them.
"""
