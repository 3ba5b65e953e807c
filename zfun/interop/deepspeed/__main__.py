"""``python -m zfun.interop.deepspeed``: start a script with the names of DeepSpeed."""

from zfun.interop.deepspeed.launcher.runner import main

if __name__ == "__main__":
    main()
