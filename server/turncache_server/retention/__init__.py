"""Retention: which free blocks the engine should hand out last, and which KV is complete.

Pure: no engine, no clock, no thread, no socket. See README.md for states and invariants.
"""
