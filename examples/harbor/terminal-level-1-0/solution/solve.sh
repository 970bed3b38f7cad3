#!/bin/sh
grep -c '' haven.txt > larch.txt
