"""Where runs are kept: ``contract`` is the specification, ``sql`` implements it."""
