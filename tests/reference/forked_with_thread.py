"""A module that starts a thread when it is imported, which a template must not have."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
