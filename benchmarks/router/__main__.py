"""`python -m benchmarks.router`"""

import sys

from benchmarks.router.run import main

sys.exit(main())
