"""``python -m commwatch.service.cli``: the command line of this very Python, wherever its script was put."""

import sys

from commwatch.service.cli import main

sys.exit(main())
