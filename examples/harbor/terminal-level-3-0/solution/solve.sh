#!/bin/sh
for f in parts/*; do [ $(grep -c '' $f) -gt 1 ] && cat $f; done > whole.txt; rm -r parts
