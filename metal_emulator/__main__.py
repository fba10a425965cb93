"""`python -m metal_emulator FILE`."""

import sys

from metal_emulator.command_line.main import main

sys.exit(main())
