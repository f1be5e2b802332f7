"""The ``torch.backends`` entry point: torch calls ``autoload`` at the end of every ``import torch``.

It must cost nothing when recording is not asked for, and must never raise: an exception here would break
``import torch`` for everybody.
"""

from os import environ


def autoload() -> None:
    """Arm recording when ``COMMWATCH_ENDPOINT`` or ``COMMWATCH_SPOOL_DIR`` is set; otherwise return at once."""
    if not (environ.get("COMMWATCH_ENDPOINT") or environ.get("COMMWATCH_SPOOL_DIR")):
        return
    try:
        from commwatch.agent.activation import arm

        arm()
    except Exception as error:  # noqa: BLE001  a raise would break the job's `import torch`
        import logging

        logging.getLogger("commwatch").warning("commwatch: not recording: %s: %s", type(error).__name__, error)
