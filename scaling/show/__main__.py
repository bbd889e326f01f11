import sys

from scaling.show.shardings import main

sys.exit(main())
