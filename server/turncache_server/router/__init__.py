"""The router: one OpenAI-compatible URL in front of one vLLM, or of prefill and decode engines.

Pure modules (``body``, ``chat``, ``plan``, ``place``, ``legs``, ``ending``, ``passing``,
``breaker``) take values and return values. Shells (``pool``, ``upstream``, ``stream``,
``calls``, ``handlers``) do the I/O, and ``app`` is the only place that wires them.
"""
