"""``turncache bench``: does it pay on this workload, against a stack that is running?

The core is pure: ``workload``, ``traces``, ``texts``, ``arms``, ``stream``, ``counters``,
``statistics``, ``verdicts``, ``report``, ``page``. ``client``, ``stack``, ``agents`` and
``saved`` do the input and output, ``command`` wires them.
"""
