"""Which vLLM the extension may act on: the table is in :mod:`turncache_server.versions`."""

from __future__ import annotations

import logging
from dataclasses import replace

from turncache.protocol import Mode
from turncache_server.connector.config import Settings
from turncache_server.versions import Support, support_of

logger = logging.getLogger(__name__)


def settings_for(settings: Settings, vllm_version: str) -> Settings:
    """Return the settings with which the extension may start on this vLLM.

    A version that is too old switches the extension off; an untested newer one starts in
    mode ``observe`` unless ``allow_untested_vllm`` is set.
    """
    support = support_of(vllm_version)
    if support is Support.TOO_OLD:
        logger.error("turncache: vLLM %s is too old, the extension stays off", vllm_version)
        return replace(settings, mode=Mode.OFF)
    if support is Support.UNTESTED and settings.mode is Mode.ON:
        if settings.allow_untested_vllm:
            logger.warning("turncache: vLLM %s is untested here, acting as told", vllm_version)
        else:
            logger.warning(
                "turncache: vLLM %s is untested here, starting in mode observe; set "
                "allow_untested_vllm to act",
                vllm_version,
            )
            return replace(settings, mode=Mode.OBSERVE)
    return settings
