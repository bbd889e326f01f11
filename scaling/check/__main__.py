import sys

from scaling.check.files import main

sys.exit(main())
