"""The folder in which a rank keeps its records until the service acknowledged them.

``<run id>/<attempt>-<rank>/`` holds ``hello.binpb`` (who), ``frames-00000001.spool`` and so on (numbered records),
``definitions.spool`` (content-addressed bodies), ``page`` (counters in shared memory), ``process`` (which process the
rank is), ``commit.binpb``, ``lock`` (held by whoever sends it) and ``forwarder.log``.
"""
